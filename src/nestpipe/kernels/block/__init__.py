"""What stands between the products of a sequence encoder's block: norms, SiLU, gates, residuals."""
