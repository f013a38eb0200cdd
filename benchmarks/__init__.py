"""Programs that measure; each says in its first lines how it is started."""
