"""The planner: TaskGraphs from annotations, and the plan that says what runs where."""
