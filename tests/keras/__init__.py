"""Tests of ``_keras``: access to what Keras does not document."""
