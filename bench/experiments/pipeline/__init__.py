"""Measure pipelines: schedules executed over MPI, with layers or with actions that only wait."""
