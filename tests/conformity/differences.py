"""Why a test of Keras that passes without a scope fails in one: a pattern of ``way: file::test``, and the cause."""

DIFFERENCES = (
    (
        r"test_dense_sparse|embedding_test.*test_sparse",
        "A batch of sparse arrays is refused with an error that says to make it dense; Keras trains on it. Its rows cannot be told apart without "
        "looking at the values.",
    ),
    (
        r"test_mel_spectrogram_basics",
        "Inputs and targets of different lengths are refused; Keras's test trains on one sound of 16,000 numbers with targets of 80 rows, as "
        "if these were a batch. A global batch has as many rows in each array.",
    ),
    (
        r"test_jit_fit_with_out_shardings_logic_distributed|OrbaxCheckpointTest::test_distributed_checkpoint_(functionality|resharding)",
        "A `keras.distribution` that is set inside of a scope is refused: it would distribute the model a second time.",
    ),
    (
        r"test_fit_with_data_adapter_generator$",
        "A generator that has ended is an error in the next epoch, and not a warning. Keras continues with the two batches that it has read before to "
        "see their shapes, and trains on them a second time.",
    ),
    (
        r"TestSpectrogram::test_spectrogram_channels_(first|broadcasting)",
        "Rounding. Keras's test compares two programs, and asks that their float32 sums of 256 products differ by no more than a millionth. In a "
        "scope each is compiled for the rows of one replica, and 2 of 335,916 numbers differ by 1.7 millionths.",
    ),
)
