"""What things cost: seconds of computing and of communication, bytes of memory; constants with their sources."""
