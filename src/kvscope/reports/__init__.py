"""Station 9, offline. In: findings with their scene. Out: something to read: prepared once, drawn in several forms."""
