"""Who may come in, and when: clients' keys, their allowances, and the queue in front of the fleet."""
