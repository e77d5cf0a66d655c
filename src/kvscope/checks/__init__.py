"""Station 4, wherever state is. In: state and one fact. Out: findings."""
