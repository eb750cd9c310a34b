"""A stage: what one rank runs of a graph, with the types and operators it has there, and the function made of it."""
