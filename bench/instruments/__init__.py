"""Instruments of measurement: clocks, repetitions, spans, memory, the wire, the host."""
