"""Figures and measurements for docs: what each mode decides and was measured to serve, what the laws predict."""
