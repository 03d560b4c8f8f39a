"""Runs the legs of one attempt: one worker that answers, or P and D in the order of their connector, or D's sidecar."""
