"""What people start beside the recipes, and what the doctor and benchmarks/ share."""
