"""Proof that plans and groups change no bit."""
