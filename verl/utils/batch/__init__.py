"""Operations on the columns that a batch is made of."""
