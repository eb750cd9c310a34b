"""The program: the instructions of each rank, and the generated function of each stage."""
