"""What may be cut where, and what the change from one cut to another is: placements, rules, forms, conversions."""
