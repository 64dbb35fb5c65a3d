"""Several processes that train one run: the coordinator and its followers. A run of one process never comes here."""
