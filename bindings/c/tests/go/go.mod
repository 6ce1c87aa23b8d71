module haul/test

go 1.19
