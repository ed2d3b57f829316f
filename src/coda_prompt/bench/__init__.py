"""Benchmarks: presets, runs, reports."""
