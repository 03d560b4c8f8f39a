"""What turns will take: profiles of engines and the law of a step, corrected by measured times; answers and pauses to come."""
