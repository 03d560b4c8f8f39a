"""What tests of the simulation share."""
