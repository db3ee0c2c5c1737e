"""Parameters as matrices, for every front end: which, in what form, and who holds their rows.

`roles` tells matrices inside a network from embeddings and output layers, `fused` splits weights
that hold several, `views` reads stacks and transposed weights, `cuts` gathers the parts that ranks
hold, and `table` shows the choice. Imports no Megatron.
"""
