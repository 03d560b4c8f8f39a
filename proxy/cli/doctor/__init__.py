"""`ppd doctor`: facts are gathered (`gather`, `probe`), pure `checks` turn them into findings, `report` prints them."""
