"""What several tests share: fleets, clients, fakes, requests."""
