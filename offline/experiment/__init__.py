"""The values of a measurement: a run, its plan, its records, and the cells they fill."""
