"""The published cluster: its figures, the systems behind them, and the calibration."""
