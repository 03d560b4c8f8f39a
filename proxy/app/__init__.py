"""The Quart application: routes for clients and operators, and the tasks that live as long as it does."""
