"""What work costs on one engine: the profile's file format, and the law for the time of a step."""
