"""The commands `ppd serve`, `table`, `keys` and `doctor`."""
