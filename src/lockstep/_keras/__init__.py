"""Everything of Keras that Keras does not document: no other package touches its internals."""
