"""Commands that predict: which settings, how many workers, which machines."""
