/*
 * Random numbers that follow from EXPLORE_SEED alone, in the place of the kernel's.
 *
 * The standard library draws the keys of its hash maps with getrandom, tokio draws the order of select! with these keys, and both
 * decide in which order objects are reconciled that change at the same instant. A seed can be replayed only if they are the same
 * in every process. Every thread draws the same numbers, so that it does not matter which one is first.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

static _Thread_local uint64_t drawn;

/* The n-th number of splitmix64. */
static uint64_t number(uint64_t seed, uint64_t n)
{
	uint64_t z = seed + n * 0x9e3779b97f4a7c15u;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

ssize_t getrandom(void *buffer, size_t length, unsigned int flags)
{
	const char *seed = getenv("EXPLORE_SEED");
	unsigned char *bytes = buffer;

	(void)flags;
	for (size_t i = 0; i < length; i++)
		bytes[i] = number(seed ? strtoull(seed, NULL, 10) : 0, ++drawn) & 0xff;
	return (ssize_t)length;
}
