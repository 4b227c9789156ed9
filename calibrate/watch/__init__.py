"""Watching a running job: a Trainer callback that times its steps and compares them with the forecast."""
