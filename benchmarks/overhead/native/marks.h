/* What both programs know: how a request names its conversation, and what is answered. bodies.py knows it too. */
#ifndef MARKS_H
#define MARKS_H

#define CONVERSATION "conversation-" /* in the first message, followed by its number */
#define DIGITS 12                    /* of the number */
#define ANSWER_ID "chatcmpl-mock-"   /* in every answer and every chunk of one, followed by the same number */
#define WORD "tide "                 /* an answer is this, max_tokens times; a chunk is one of them */

#endif
