"""EPL's tests. A package, so that tests and the ranks they start import the helpers here by one name."""
