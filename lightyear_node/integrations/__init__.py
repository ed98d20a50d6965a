"""Integrations with other tools.

tracking/       completed rounds for CSV, TensorBoard and MLflow
monai_bundle    a task from a MONAI bundle; imported by the worker only, for it loads torch
"""
