"""Capture: the only home of private torch APIs. ``capture.capture`` turns a model and a batch into a graph."""
