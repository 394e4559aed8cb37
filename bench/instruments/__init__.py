"""Instruments of measurement: clocks, repetitions, statistics, spans, memory, the host."""
