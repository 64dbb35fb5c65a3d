"""Reports: what a run's folder and its predictions say about it, as facts, a page and a model card."""
