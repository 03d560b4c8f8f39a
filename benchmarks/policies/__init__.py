"""Which mode serves the most sessions within the SLO, on which traces and fleets, and by how much?"""
