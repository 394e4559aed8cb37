"""Instruments: clocks, repetitions, statistics, memory, the host."""
