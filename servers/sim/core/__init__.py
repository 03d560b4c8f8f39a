"""The simulated engine as pure values: scheduler, prefix cache, handoffs, faults. It knows no clock and no socket."""
