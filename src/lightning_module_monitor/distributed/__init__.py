"""Communication with other ranks: reduction of what each has observed, sharded parameters, agreement on what is recorded."""
