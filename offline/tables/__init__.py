"""Decision tables, made from runs or from published rows."""
