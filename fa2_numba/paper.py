"""The steps of the papers' algorithms, in our words; kernels cite them as `FA2 Alg. 1 line 9`.

FA1: Dao, Fu, Ermon, Rudra, Re: FlashAttention (2022), arXiv:2205.14135.
FA2: Dao: FlashAttention-2 (2023), arXiv:2307.08691.
FA3: Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: FlashAttention-3 (2024), arXiv:2407.08608.
"""

PAPER_STEPS = {
    "FA1 Alg. 1": {
        2: "O = 0, l = 0, m = -inf in HBM",
        5: "for every tile j of keys and values",
        6: "load K_j, V_j on chip",
        7: "for every tile i of queries",
        8: "load Q_i, O_i, l_i, m_i on chip",
        9: "S = Q_i K_j^T",
        10: "m~ = rowmax(S), P~ = exp(S - m~), l~ = rowsum(P~)",
        11: "m_new and l_new: old and new statistics under one maximum",
        12: "O_i = (l_i e^(m_i - m_new) O_i + e^(m~ - m_new) P~ V_j) / l_new to HBM",
        13: "l_i = l_new, m_i = m_new to HBM",
    },
    "FA2 Alg. 1": {
        3: "for every tile i of queries",
        4: "load Q_i on chip",
        5: "O = 0, l = 0, m = -inf on chip",
        6: "for every tile j of keys and values",
        7: "load K_j, V_j on chip",
        8: "S = Q_i K_j^T",
        9: "m = max(m, rowmax(S)), P~ = exp(S - m), l = e^(m_old - m) l + rowsum(P~)",
        # The paper prints this factor with a stray inverse.
        10: "O = e^(m_old - m) O + P~ V_j",
        12: "O = O / l",
        13: "L = m + log l",
        14: "write O_i to HBM",
        15: "write L_i to HBM",
    },
    "FA2 Alg. 2": {
        3: "dQ = 0 in HBM",
        4: "D = rowsum(dO o O) to HBM (o: element by element)",
        5: "for every tile j of keys and values",
        6: "load K_j, V_j on chip",
        7: "dK_j = 0, dV_j = 0 on chip",
        8: "for every tile i of queries",
        9: "load Q_i, O_i, dO_i, dQ_i, L_i, D_i on chip",
        10: "S = Q_i K_j^T",
        11: "P = exp(S - L_i)",
        12: "dV_j = dV_j + P^T dO_i",
        13: "dP = dO_i V_j^T",
        14: "dS = P o (dP - D_i)",
        15: "dQ_i = dQ_i + dS K_j to HBM",
        16: "dK_j = dK_j + dS^T Q_i",
        18: "write dK_j, dV_j to HBM",
    },
    # Its consumer is the one without overlap, in place of which Alg. 2 stands.
    "FA3 Alg. 1": {
        1: "make the barriers of a ring of s stages in shared memory",
        3: "the producer gives registers back",
        4: "load Q_i into shared memory",
        5: "once it is there, the consumers are told",
        6: "for every tile j of keys and values",
        7: "wait until stage j mod s is empty",
        8: "load K_j, V_j into it",
        9: "once they are there, the consumers are told",
    },
    "FA3 Alg. 2": {
        1: "a consumer takes registers",
        2: "O = 0, l = 0, m = -inf on chip",
        3: "wait for Q_i and K_0 in shared memory",
        4: "S = Q_i K_0^T; wait for it",
        5: "release the stage of K_0",
        6: "m, P and l from S; rescale O",
        # The paper prints a bound of one tile less.
        7: "for every tile j of keys and values but the first",
        8: "wait for K_j in shared memory",
        9: "issue S = Q_i K_j^T",
        10: "wait for V_(j-1) in shared memory",
        11: "issue O = O + P V_(j-1)",
        12: "wait for S",
        13: "m, the next P and l from S",
        14: "wait for O, then rescale it",
        15: "release the stages of K_j and V_(j-1)",
        16: "the next P takes the place of P",
        18: "wait for the last V in shared memory",
        19: "O = O + P V; wait for it",
        20: "O = O / l, L = m + log l; write both to HBM",
    },
}
"""Algorithm -> line number -> what happens there."""
