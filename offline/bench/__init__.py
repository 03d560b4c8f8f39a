"""`ppd bench`: one workload against one endpoint, and what came of it."""
