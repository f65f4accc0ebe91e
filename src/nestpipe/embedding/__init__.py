"""Tables that grow, sharded over ranks: stores, routing, exchange, row optimizers."""
