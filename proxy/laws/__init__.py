"""What work costs on one engine: profiles of engines, and the law for the time of a step."""
