"""What turns will take: profiles of engines, corrected by what turns measure; answers and pauses to come."""
