"""Predict steps of training whose layers are divided among pipeline stages, in equal replicas."""
