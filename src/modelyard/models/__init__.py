"""Models, their tasks, optimizers and learning-rate schedules."""
