"""Reports: one self-contained HTML page about a sweep, or about the rows published with the paper."""
