"""Which lane of a warp holds which element of a tensor-core tile.

An `mma` multiplies a 16 x K tile A with a K x 8 tile B and adds a 16 x 8 tile C; the 32 lanes of a
warp hold the three in their registers. What one lane holds of a matrix is itself a small matrix,
its element (i, j) at row i and column j of what the lane holds; the functions here say where in the
whole matrix that is. They go on beyond one tile: in a matrix of several tiles side by side, i and j
simply count on. (PTX ISA, "Matrix Fragments for mma.m16n8k16".)

A and C lie alike, so S = Q K^T, computed as a C, is at once the A of the next product P V.
"""

GROUP_ROWS = 8
"""A lane's next row is so many rows further down; eight rows of four lanes make a warp."""

LANES_PER_ROW = 4


def ac_element(lane, i, j):
    """Row and column of element (i, j) of what a lane holds of A, or of C.

    Four lanes share a row, two neighbouring elements each. Lane 5 is the second of row 1:

    >>> [ac_element(5, 0, j) for j in range(4)]
    [(1, 2), (1, 3), (1, 10), (1, 11)]
    >>> ac_element(5, 1, 0)
    (9, 2)
    """
    row = lane // LANES_PER_ROW + GROUP_ROWS * i
    return row, 2 * (lane % LANES_PER_ROW) + 2 * LANES_PER_ROW * (j // 2) + j % 2


def b_element(lane, i, j):
    """Row and column of element (i, j) of what a lane holds of B: as A lies, transposed.

    >>> [b_element(5, i, 0) for i in range(4)]
    [(2, 1), (3, 1), (10, 1), (11, 1)]
    """
    col, row = ac_element(lane, j, i)
    return row, col


def matrix_element(lane, e):
    """Row and column of a lane's element e (0 or 1) of an 8 x 8 matrix that `ldmatrix` has loaded.

    It is the first part of A (the upper left 8 x 8), whatever the matrix is used for.

    >>> matrix_element(5, 0), matrix_element(5, 1)
    ((1, 2), (1, 3))
    """
    return ac_element(lane, 0, e)


def a_matrix_row(lane):
    """What a lane points `ldmatrix` x4 to, for a tile of A: its row, and its chunk of 8 columns.

    Lanes 8q to 8q + 7 point to the rows of matrix q, which goes to register q of each lane. The
    registers of A go down before they go right: matrix 1 holds rows 8 to 15.

    >>> a_matrix_row(9), a_matrix_row(17)
    ((9, 0), (1, 1))
    """
    return lane % 16, lane // 16


def b_matrix_row(lane):
    """The same for two tiles of B, side by side, where memory holds the rows of B^T, as it does K.

    Register 1 is the lower half of the first tile, so matrix 1 is right of matrix 0 in memory.

    >>> b_matrix_row(9), b_matrix_row(17)
    ((1, 1), (9, 0))
    """
    return lane % 8 + 8 * (lane // 16), lane // 8 % 2
