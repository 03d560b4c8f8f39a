class Receiver:
    """For compiled code alone, see receiver.pyx."""
